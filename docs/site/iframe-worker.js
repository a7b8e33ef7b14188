// Search runs in a Worker, and browsers give none to pages that were opened from a folder (file:). There an invisible frame of the
// same page does the work: it loads the script, and passes messages on.
if (location.protocol === "file:") {
  class IFrameWorker extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      this.queue = []
      // Scripts that the worker imports are added one after the other, as importScripts does; it waits for what this returns.
      this.frame.srcdoc = `<script>
        var handlers = []
        window.addEventListener = (kind, handler) => { if (kind === "message") handlers.push(handler) }
        window.postMessage = data => parent.dispatchEvent(new CustomEvent("iframe-worker", { detail: { data, source: window } }))
        window.importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise(done => {
          const script = document.createElement("script")
          script.src = url
          script.onload = script.onerror = done
          document.head.appendChild(script)
        })), Promise.resolve())
      <\/script><script src="${url}"><\/script>`
      this.frame.onload = () => {
        this.ready = true
        for (const data of this.queue.splice(0)) this.deliver(data)
      }
      window.addEventListener("iframe-worker", event => {
        if (event.detail.source !== this.frame.contentWindow) return
        const message = new MessageEvent("message", { data: event.detail.data })
        this.dispatchEvent(message)
        if (this.onmessage) this.onmessage(message)
      })
      document.addEventListener("DOMContentLoaded", () => document.body.appendChild(this.frame))
      if (document.body) document.body.appendChild(this.frame)
    }
    deliver(data) {
      for (const handler of this.frame.contentWindow.handlers) handler({ data })
    }
    postMessage(data) {
      if (this.ready) this.deliver(data)
      else this.queue.push(data)
    }
    terminate() {
      this.frame.remove()
    }
  }
  window.IFrameWorker = window.Worker = IFrameWorker
}
