"""What the site's search puts first: ``python -m tests.site_search docs/_build/html``.

It asks the built site each of the questions below, in Chromium, and prints those whose
first result is another page. `.ci/site` runs it where a Chromium is installed.
"""

import functools
import http.server
import json
import queue
import shutil
import subprocess
import sys
import tempfile
import threading

# What users type, and the page that answers it.
QUESTIONS = {
    "muon": "sharding",
    "distributed muon": "sharding",
    "fsdp": "sharding",
    "resume from checkpoint": "sharding",
    "clipnorm": "coming_from/keras",
    "keras adagrad": "coming_from/keras",
    "out of memory": "larger_model",
    "oom": "larger_model",
    "cpu offload": "larger_model",
    "gradient checkpointing": "larger_model",
    "faq": "which",
    "gradient accumulation": "micro_batches",
    "multisteps": "micro_batches",
    "micro batches": "micro_batches",
    "bf16": "half_precision",
    "stochastic rounding": "half_precision",
    "8-bit adam": "half_precision",
    "mixed precision": "half_precision",
    "loss spikes": "spikes",
    "skip nan": "spikes",
    "lora": "recipes",
    "ema": "recipes",
    "layer-wise learning rate decay": "recipes",
    "knowledge distillation": "recipes",
    "cautious weight decay": "recipes",
    "embedding table": "sparse",
    "sparse gradients": "sparse",
    "indexedslices": "sparse",
    "asynchronous sgd": "late",
    "stale gradients": "late",
    "fedbuff": "late",
    "diloco": "late",
    "ray": "engines",
    "tensorboard": "engines",
    "openseq2seq": "coming_from/novograd",
    "tf.train": "coming_from/tensorflow",
    "flax": "frameworks",
    "equinox": "frameworks",
    "haiku": "frameworks",
    "scan over layers": "scanned_layers",
    "maxtext": "trainers",
    "tunix": "trainers",
    "keras fit": "keras",
    "pinned_host": "host",
    "zero-1": "sharding",
    "pip install": "install",
    "python version": "versions",
    "yaml": "config",
    "benchmark": "costs",
    "drop_stale": "api/late",
}
SECONDS = 120  # For all of them.
BROWSERS = "chromium", "chromium-browser", "google-chrome"
ASK = """<body><script>
const questions = %s, found = {};
const done = () => fetch("/found", {method: "POST", body: JSON.stringify(found)});
const ask = (question) => {
  const frame = document.createElement("iframe");
  frame.src = "/search.html?q=" + encodeURIComponent(question);
  document.body.append(frame);
  const look = () => {
    const page = frame.contentDocument;
    if (!page?.querySelector("#search-results .search-summary")?.innerText)
      return setTimeout(look, 20);
    const links = [...page.querySelectorAll("ul.search > li > a")];
    found[question] = links.slice(0, 5).map((link) => link.getAttribute("href"));
    frame.remove();
    questions.length ? ask(questions.shift()) : done();
  };
  look();
};
ask(questions.shift());
</script></body>"""


def browser():
    """The path of a Chromium, or None."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves the site, and the page that asks it and brings what it has found."""

    def __init__(self, *args, found, **options):
        self.found = found
        super().__init__(*args, **options)

    def do_GET(self):
        if self.path != "/ask":
            return super().do_GET()
        self.answer((ASK % json.dumps([*QUESTIONS])).encode())

    def do_POST(self):
        said = self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(b"")
        self.found.put(json.loads(said))

    def answer(self, body):
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        """Prints nothing."""


def results(folder):
    """The first pages that the search of a built site finds for each question."""
    found = queue.SimpleQueue()
    handler = functools.partial(Handler, directory=folder, found=found)
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server,
    ):
        server.handle_error = lambda *_: None  # A frame that is removed hangs up.
        threading.Thread(target=server.serve_forever, daemon=True).start()
        options = ["--headless=new", "--no-sandbox", f"--user-data-dir={profile}"]
        address = f"http://127.0.0.1:{server.server_port}/ask"
        command = [browser(), *options, "--remote-debugging-port=0", address]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        with subprocess.Popen(command, **quiet) as process:
            try:
                return found.get(timeout=SECONDS)
            finally:
                process.terminate()
                server.shutdown()


def faults(folder):
    """A line for each question whose first result is another page."""
    found = results(folder)
    for question, page in QUESTIONS.items():
        pages = [link.partition(".html")[0] for link in found[question]]
        if pages[:1] != [page]:
            yield f"{question!r} finds {', '.join(pages) or 'nothing'}: {page} first"


if __name__ == "__main__":
    if browser() is None:
        print(f"the search was not asked: none of {', '.join(BROWSERS)} is there")
    else:
        sys.exit("\n".join(faults(sys.argv[1])) or 0)
