"""Colours and style of the pictures. Colours are names that the page defines, for light and for dark."""

#: Colours by name: what matplotlib is given, a mark that is replaced by the page's variable, and the colour
#: where a picture is looked at by itself.
COLOURS = {
    "ink": ("#010101", "#24292f"),
    "faint": ("#010102", "#8a929b"),
    "line": ("#010103", "#d0d7de"),
    "one": ("#010104", "#1f6f9f"),
    "two": ("#010105", "#d9822b"),
    "three": ("#010106", "#3a8f5c"),
    "four": ("#010107", "#8a5fb5"),
    "bad": ("#010108", "#c93c37"),
    "soft": ("#010109", "#cfe3f0"),
    "paper": ("#01010a", "#ffffff"),
}
C = {name: mark for name, (mark, _) in COLOURS.items()}
SERIES = [C[name] for name in ("one", "two", "three", "four")]

STYLE = {
    "svg.fonttype": "none",
    "font.size": 10,
    "text.color": C["ink"],
    "axes.labelcolor": C["ink"],
    "axes.edgecolor": C["faint"],
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": C["faint"],
    "ytick.color": C["faint"],
    "xtick.labelcolor": C["ink"],
    "ytick.labelcolor": C["ink"],
    "figure.constrained_layout.use": True,
    "legend.frameon": False,
    "legend.fontsize": 9,
}
