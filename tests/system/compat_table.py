"""Where Llamastead answers otherwise than the real router, each with its reason: compat_page.py prints it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from compat_kit import Deviation


@dataclass(frozen=True)
class Difference:
    """One rule of the table. `requests` and `facts` are patterns that must match in full.

    `by_build`: the router does so in some builds only, so another engine may well not show it. `newer`: only
    builds newer than the tests' own do so.
    """

    requests: str
    facts: str
    what: str
    theirs: str
    ours: str
    why: str
    by_build: bool = False
    newer: bool = False

    def covers(self, deviation: Deviation) -> bool:
        """Whether this rule explains what differs."""
        return bool(
            re.fullmatch(self.requests, deviation.request) and re.fullmatch(self.facts, deviation.fact)
        )


ERROR = r"status|body|body\.error|body\.error\.(?:code|message|type|param)"
STATUS = r"asleep|configured|ready|resident|state|evictable|spared|pid|reason|end_class"
BROKEN_JSON = r"empty|garbage|\{|\{\"model\":\"chat\"\} x"

DIFFERENCES: tuple[Difference, ...] = (
    # -- lists and properties
    Difference(
        r"GET (?:/v1)?/models(?:\?reload=1)?(?: .*)?",
        rf"body\.data\[\]\.(?:in_cache|memory|metadata|path|revision|status\.(?:{STATUS}))(?:\..*|\[.*)?",
        "`GET /models`, `GET /v1/models`",
        "the router's fields",
        "these and more: `revision`, `path`, `in_cache`, `metadata`, `memory`, `status.state` and its like",
        "Clients ignore fields that they don't know; whoever runs the herd sees why a model is where it is.",
    ),
    Difference(
        r"GET /v1/models/chat",
        r".*",
        "`GET /v1/models/{id}`",
        "404",
        "the model's entry of the list",
        "A look at one model needs neither the list nor a load.",
    ),
    Difference(
        r"GET /props(?:\?model=)?(?: .*)?",
        r"body\.llamastead",
        "`GET /props` without a model",
        "the router's fields",
        "these and `llamastead`: version, limits, devices",
        "Which herd answers, and what it enforces.",
    ),
    Difference(
        r"GET /metrics(?:\?model=)?(?: .*)?",
        rf"{ERROR}|header content-type",
        "`GET /metrics` without a model",
        "400",
        "one page for the whole herd",
        "A scraper needs one address.",
    ),
    Difference(
        r"(?:GET|HEAD) /metrics\?model=\w+(?:&autoload=\w+)? \[(?:chat loaded|.* sleeping)\]",
        rf"{ERROR}|header content-type",
        "`GET /metrics?model=`",
        "501 unless `--metrics` is given",
        "the instance's page",
        "Instances run with `--metrics`: the herd's page needs their figures.",
    ),
    # -- reads don't load
    Difference(
        r"GET /(?:props|slots|lora-adapters|metrics)\?model=chat \[chat cold\]",
        r".*",
        "`GET …?model=` of a model that is not loaded",
        "loads it",
        "400 `model is not loaded`, unless `?autoload=true` is said",
        "A dashboard that polls must not load every model in turn.",
    ),
    Difference(
        r"GET /metrics\?model=chat&autoload=true \[chat cold\]",
        rf"{ERROR}|header content-type",
        "`GET /metrics?model=&autoload=true`",
        "501 unless `--metrics` is given",
        "loads it and shows its page",
        "As above: instances run with `--metrics`.",
    ),
    # -- names
    Difference(
        r".*",
        r"body\.error\.param",
        "an error about one field",
        "message, type, code",
        "these and `param`, the field's name",
        "As OpenAI's errors have it.",
    ),
    Difference(
        r'POST /v1/chat/completions \((?:\{"model":5\}|\{"model":\["chat"\]\})\)',
        r"body\.error\.message",
        "a `model` that is no string",
        "`model name is missing from the request`",
        "says that it must be a string, and what it is",
        "It is not missing.",
    ),
    Difference(
        r"POST [^ ]*[?&]model=chat \[chat loaded\](?: \((?:name in the query|no body)\))?",
        r"(?!header).*",
        "`POST …?model=` without a model in the body",
        "builds up to b10068: 400 or 500; newer ones take it",
        "takes it",
        "The body's name first, then the query's, on every route.",
        by_build=True,
    ),
    Difference(
        r"POST .* \[chat loaded\] \(two names\)|POST /slots/0\?action=save&model=embed \[chat loaded\]",
        r"status|body\..*",
        "one model in the body, another in the query",
        "the body's counts",
        "400 that names both; a name and its alias are no conflict",
        "One of the two is a mistake, and nobody can tell which.",
    ),
    Difference(
        r"POST /v1/systemone \(no model\)",
        ERROR,
        "`POST /v1/systemone` without a model",
        "builds up to b10434: 404, as they do not know it",
        "400; with a model the engine's own answer",
        "Decision models need a newer engine, which one model alone may have.",
        by_build=True,
    ),
    # -- bodies
    Difference(
        rf"POST /v1/chat/completions \((?:{BROKEN_JSON})\)",
        ERROR,
        "a body that is not JSON",
        "500 with the parser's exception",
        "400 with line and column",
        "The client's fault, not the server's.",
    ),
    Difference(
        rf"POST /models(?:/load|/unload)? \((?:{BROKEN_JSON}|\[\]|\{{.*\}})\)",
        ERROR,
        "`POST /models`, `/models/load`, `/models/unload` with a bad body or an unknown model",
        "500, or 404 with `File Not Found`",
        "400, or 404 for an unknown model on load, with a message that says which field or model",
        "Each refusal keeps its own message.",
    ),
    Difference(
        r"POST /v1/chat/completions \[chat loaded\] \(gzip\)",
        r"status|body.*|header content-type",
        "`Content-Encoding: gzip` or `deflate` on a request",
        "415 without a body",
        "decoded, up to 512 MiB",
        "Clients compress long prompts.",
    ),
    Difference(
        r"POST /v1/chat/completions \[chat loaded\] \(compress\)",
        r"body.*|header content-type",
        "any other `Content-Encoding`",
        "415 without a body",
        "415 with an error that names the coding",
        "Clients show the error's message.",
    ),
    # -- answers
    Difference(
        r"POST .* \(stream\)",
        r"header cache-control",
        "a streamed answer",
        "no `Cache-Control`",
        "`Cache-Control: no-cache`",
        "No proxy on the way may keep or hold back events.",
    ),
    Difference(
        r"POST /v1/chat/completions \(a broken file(?: again)?\)",
        r"body\.error\.(?:message|end_class|log|reason)|header retry-after",
        "a model that does not load",
        "500 `model name=… failed to load`",
        "the same and why: `reason`, `end_class`, the engine's last lines; soon after with `Retry-After`",
        "The reason is in the engine's log, which the client can't read; a doomed start waits.",
    ),
    Difference(
        r"POST /slots/",
        ERROR,
        "`POST /slots/` without a number",
        "forwarded",
        "404",
        "It is no slot's path.",
    ),
    Difference(
        r"DELETE /models\?model=(?:nope|chat) \[chat cold\]",
        ERROR,
        "`DELETE /models` of a model that is not there, or not of the hub cache",
        "500",
        "404, or 400 that says where it comes from",
        "The client's fault, not the server's.",
    ),
    # -- conversations
    Difference(
        r"(?:GET|DELETE) /v1/stream(?:\?conv_id=nobody)?",
        r"status|body.*|header content-type",
        "`/v1/stream?conv_id=` (builds from b10434 on) and `/v1/stream/{id}` (up to b10068)",
        "one of the two forms, by build",
        "both forms with any build; 400 without an id",
        "Clients of either kind go on when the engine changes.",
        by_build=True,
    ),
    Difference(
        r"(?:GET|DELETE) /v1/stream/.+",
        r".+",
        "`/v1/stream/{id}` in builds that know only the query form",
        "404",
        "as the query form",
        "Clients of either kind go on when the engine changes.",
        newer=True,
    ),
    Difference(
        r"GET /v1/stream/(?:nobody|talk \(deleted\))",
        r"body\.error\.(?:message|reason)",
        "a conversation that is not there",
        "404 `File Not Found`",
        "404 that names it, and says how it ended if that is known",
        "Each refusal keeps its own message.",
    ),
    Difference(
        r"GET /v1/stream/talk(?:\?from=\d+)?",
        r"header cache-control",
        "a replayed answer",
        "no `Cache-Control`",
        "`Cache-Control: no-cache`",
        "As for any stream.",
    ),
    Difference(
        r"DELETE /v1/stream/\w+",
        r"header content-type",
        "the empty answer to `DELETE /v1/stream`",
        "`Content-Type: application/json`",
        "none",
        "There is no body.",
    ),
    Difference(
        r"POST /v1/streams/lookup \(.*\)",
        r"status|body.*",
        "`POST /v1/streams/lookup` without a list of ids",
        "200 with an empty list",
        "400 that says what is wrong",
        "A mistake would look like an answer.",
    ),
    # -- what happens, in /models/sse
    Difference(
        r"events",
        r"event\.data\.(?:instance|memory|end_class|reason)(?:\..*|\[.*)?",
        "events of `/models/sse`",
        "the router's fields",
        "these and `instance`, `memory` when loaded, `end_class` and `reason` when unloaded",
        "What ended and why can't be asked for afterwards.",
    ),
    # -- pages of other origins
    Difference(
        r".*\((?:null|https?://[^,]*)(?:, no key)?\)",
        r"header vary",
        "an answer to a page of another origin",
        "no `Vary`",
        "`Vary: Origin`",
        "Caches must not hand one page's answer to another.",
    ),
    Difference(
        r".*",
        r"header access-control-allow-origin",
        "several `--cors-origins`",
        "the whole list, to everybody",
        "the page's own origin if it is listed, else none",
        "Browsers take one origin, so with the list no page can read the answer.",
    ),
    Difference(
        r"OPTIONS .*",
        r"header content-type",
        "the empty answer to `OPTIONS`",
        "`Content-Type: text/html`",
        "none",
        "There is no body.",
    ),
    Difference(
        r"OPTIONS .*",
        r"header access-control-allow-headers",
        "`Access-Control-Allow-Headers` by default",
        "`*`",
        "`*, Authorization`",
        "Browsers do not count `Authorization` in the star, so keys could not be sent.",
    ),
    Difference(
        r"OPTIONS .*",
        r"header access-control-allow-credentials",
        "`Access-Control-Allow-Credentials`",
        "`true` on `OPTIONS`, to everybody",
        "`true` on every answer to an origin named in `--cors-origins`, never while any may call",
        "Browsers want it on the answer itself; and any page could use the login at a proxy in front.",
    ),
    Difference(
        r"(?:GET|POST) .*\((?:http://one|https://two)\.example(?:, no key)?\)",
        r"header access-control-allow-credentials",
        "the same on other methods",
        "no such header",
        "`true`, as above",
        "As above.",
    ),
    # -- keys
    Difference(
        r"GET (?:/v1)?/models \((?:no key|authorization: Bearer wrong)\)",
        r"status|body\..*",
        "`GET /models`, `GET /v1/models` without a key, where keys are set",
        "builds up to b10434: 200; newer ones 401",
        "401",
        "Names, paths and arguments of models are nobody else's business.",
        by_build=True,
    ),
    Difference(
        r".*\(authorization: bearer sk-the-clients\)",
        r"status|body\..*",
        "`Authorization: bearer KEY`",
        "401: only `Bearer` counts",
        "taken",
        "RFC 9110: the scheme's case does not matter.",
    ),
    # -- newer builds
    Difference(
        r"POST /v1/chat/completions \[chat loaded\] \(compress\)",
        r"status",
        "a `Content-Encoding` that nobody decodes, in newer builds",
        "200: the header is ignored",
        "415, as in builds up to b10068",
        "A body that says it is compressed is not taken for JSON.",
        newer=True,
    ),
    Difference(
        r"events",
        r"event\.data\.info\.architecture",
        "`info.architecture` of `/models/sse`",
        "builds up to b10434: absent",
        "there",
        "Clients of newer builds look for it.",
        by_build=True,
    ),
    Difference(
        r"events",
        r"event\.data\.progress",
        "progress of a load of a few milliseconds, in newer builds",
        "told",
        "told only where it lasts",
        "Steps that are over when they could be told are left out.",
        newer=True,
    ),
    # -- the web UI
    Difference(
        r"GET / \(no gzip\)",
        r"status|body|header .*",
        "the web UI for a client that takes no gzip",
        "415",
        "uncompressed",
        "Not every client is a browser.",
        by_build=True,
    ),
    Difference(
        r"GET /(?:index\.html)?(?: \(.*\))?",
        r"header cache-control",
        "`Cache-Control` of the web UI's start page",
        "a year, immutable",
        "`no-cache`, with an `ETag`",
        "A browser would never see the page of the next engine under the same address.",
        by_build=True,
    ),
    Difference(
        r"GET /[\w./]*(?: \(.*\))?",
        r"header vary",
        "the web UI's pages",
        "no `Vary`",
        "`Vary: Accept-Encoding`",
        "They may be compressed or not.",
    ),
)


def unlisted(deviations: Sequence[Deviation], any_build: bool) -> list[Deviation]:
    """Return what differs and stands in no rule; with `any_build` rules of newer builds count, too."""
    rules = [rule for rule in DIFFERENCES if any_build or not rule.newer]
    return [deviation for deviation in deviations if not any(rule.covers(deviation) for rule in rules)]


def vanished(deviations: Sequence[Deviation], any_build: bool) -> list[Difference]:
    """Return the rules that nothing fell under; with `any_build` only those that hold for every build."""
    expected = [rule for rule in DIFFERENCES if not (rule.newer or (any_build and rule.by_build))]
    return [rule for rule in expected if not any(map(rule.covers, deviations))]
