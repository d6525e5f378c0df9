// Search runs in a worker, which browsers do not start from a file. There an invisible frame does what it would do.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.appendChild(this.frame);
      this.ready = new Promise((resolve) => {
        addEventListener("message", (event) => {
          if (event.source !== this.frame.contentWindow) return;
          if (event.data === "worker is ready") return resolve();
          const message = new MessageEvent("message", { data: event.data });
          this.dispatchEvent(message);
          if (this.onmessage) this.onmessage(message);
        });
      });
      const page = this.frame.contentDocument;
      page.open();
      page.write(`<!doctype html><script>
        postMessage = (data) => parent.postMessage(data, "*");
        importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise((resolve) => {
          const script = document.createElement("script");
          script.src = url;
          script.onload = resolve;
          document.head.appendChild(script);
        })), Promise.resolve());
      </script><script src="${url}"></script><script>parent.postMessage("worker is ready", "*")</script>`);
      page.close();
    }
    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
