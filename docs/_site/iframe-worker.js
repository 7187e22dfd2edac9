// Search in pages that were opened from a folder: browsers start no worker for file:, so the worker's script runs in a
// hidden frame instead, behind the same three names: postMessage, onmessage and the event "message".
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super()
      this.addEventListener("message", event => this.onmessage && this.onmessage(event))
      const frame = document.createElement("iframe")
      frame.hidden = true
      this.frame = new Promise(loaded => {
        const begin = () => {
          const inner = frame.contentWindow
          inner.postMessage = data => this.dispatchEvent(new MessageEvent("message", {data}))
          const script = inner.document.createElement("script")
          script.src = address
          script.onload = () => loaded(inner)
          inner.document.body.append(script)
        }
        if (document.body) {
          document.body.append(frame)
          begin()
        } else {
          addEventListener("DOMContentLoaded", () => { document.body.append(frame); begin() })
        }
      })
    }
    postMessage(data) {
      this.frame.then(inner => inner.dispatchEvent(new inner.MessageEvent("message", {data})))
    }
    terminate() {
      this.frame.then(inner => inner.frameElement.remove())
    }
  }
}
