// A page opened from disk may not start a worker. There, the theme's search
// runs in a hidden frame instead: as a script of the site, since the policy of
// the pages allows nothing else.
if (location.protocol === "file:")
  globalThis.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      const { document: page } = this.inside;
      // Or the browser may still replace the empty page by another.
      page.open();
      page.close();
      this.inside.postMessage = (data) =>
        this.dispatchEvent(new MessageEvent("message", { data }));
      const script = page.createElement("script");
      this.begun = new Promise((done) => script.addEventListener("load", done));
      script.src = url;
      page.body.append(script);
    }

    async postMessage(data) {
      await this.begun;
      this.inside.dispatchEvent(new MessageEvent("message", { data }));
    }
  };
