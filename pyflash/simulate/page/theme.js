// Light and dark: what the system says, until the reader says otherwise.

const THEME_KEY = "pyflash-simulator-theme";

const isDark = () => {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
};

function showThemeName() {
  byId("theme-name").textContent = isDark() ? "Light" : "Dark";
}

function toggleTheme() {
  const theme = isDark() ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  try {
    localStorage.setItem(THEME_KEY, theme);
  } catch {
    // A browser that keeps nothing for files: the choice holds until the page is closed.
  }
  showThemeName();
}

function startTheme() {
  try {
    const kept = localStorage.getItem(THEME_KEY);
    if (kept === "dark" || kept === "light") document.documentElement.dataset.theme = kept;
  } catch {
    // As above.
  }
  showThemeName();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showThemeName);
  byId("theme").addEventListener("click", toggleTheme);
}
