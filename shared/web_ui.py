"""Where the pages of llama-server's web UI lie in the run folder: `web-ui/<identity>/`.

`index.json` there has path → {"file": its name in the folder, "headers": what the engine sends with it};
files are as the engine sends them, most of them compressed with gzip.
"""

FOLDER = "web-ui"
INDEX = "index.json"
KEPT_HEADERS = (
    *("content-type", "content-encoding", "cache-control", "etag"),
    *("cross-origin-opener-policy", "cross-origin-embedder-policy"),
)
