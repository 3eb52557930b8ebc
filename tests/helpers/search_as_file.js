// Answers a query with the search worker of a built site, started as on a page that is opened as a file:
//     node search_as_file.js SITE QUERY
// The windows are the least of a browser that docs/assets/file_worker.js and the theme's worker need.
const vm = require("vm"), fs = require("fs"), path = require("path")
const [site, query] = process.argv.slice(2)
const read = (...parts) => fs.readFileSync(path.join(site, ...parts), "utf8")

function newWindow() {
  const target = new EventTarget()
  const window = { EventTarget, MessageEvent, Event, URL, console, location: { protocol: "file:" } }
  window.addEventListener = target.addEventListener.bind(target)
  window.dispatchEvent = target.dispatchEvent.bind(target)
  window.window = window.self = window
  const later = element => setTimeout(() => element.dispatchEvent(new Event("load")), 1)
  const run = script => { vm.runInContext(fs.readFileSync(script.src, "utf8"), window); later(script) }
  const create = () => Object.assign(new EventTarget(), { contentWindow: null })
  window.document = {
    createElement: tag => Object.assign(create(), tag === "iframe" ? { contentWindow: newWindow() } : {}),
    head: { append: run },
    body: { append: later },
  }
  return vm.createContext(window)
}

const page = newWindow()
vm.runInContext(read("assets", "file_worker.js"), page)
vm.runInContext(read("search", "search_index.js"), page)
const workers = path.join(site, "assets", "javascripts", "workers")
const worker = new page.Worker(path.join(workers, fs.readdirSync(workers).find(name => name.endsWith(".js"))))
worker.addEventListener("message", ({ data }) => {
  if (data.type === 1) worker.postMessage({ type: 2, data: query })
  if (data.type === 3) console.log(data.data.items.map(item => item[0].location).join("\n"))
})
worker.postMessage({ type: 0, data: { ...page.__index, options: { suggest: false } } })
