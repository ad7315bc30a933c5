// Search in pages that are opened from files. Browsers start no workers there, so the search runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.appendChild(frame)
      const inner = frame.contentWindow
      inner.postMessage = data => this.dispatchEvent(new MessageEvent("message", {data}))
      const script = inner.document.createElement("script")
      script.src = url
      this.ready = new Promise(resolve => { script.onload = () => resolve(inner) })
      inner.document.body.appendChild(script)
    }
    postMessage(data) {
      this.ready.then(inner => inner.dispatchEvent(new MessageEvent("message", {data})))
    }
  }
}
