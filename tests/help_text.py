"""An excerpt of llama-server's --help with each form that occurs in it, for tests that need no engine."""

from llamastead.supervisor.registry.options import OptionTable, parse_help

HELP = """\
----- common params -----

-h,    --help, --usage                  print usage and exit
--version                               show version and build info
-t,    --threads N                      number of CPU threads to use during generation (default: -1)
                                        (env: LLAMA_ARG_THREADS)
-c,    --ctx-size N                     size of the prompt context (default: 0, 0 = loaded from model)
                                        (env: LLAMA_ARG_CTX_SIZE)
-b,    --batch-size N                   logical maximum batch size (default: 2048)
                                        (env: LLAMA_ARG_BATCH)
--swa-full                              use full-size SWA cache (default: false)
                                        [(more
                                        info)](https://github.com/ggml-org/llama.cpp/pull/13194#issuecomment-2868343055)
                                        (env: LLAMA_ARG_SWA_FULL)
-kvo,  --kv-offload, -nkvo, --no-kv-offload
                                        whether to enable KV cache offloading (default: enabled)
                                        (env: LLAMA_ARG_KV_OFFLOAD)
--repack, -nr, --no-repack              whether to enable weight repacking (default: enabled)
                                        (env: LLAMA_ARG_REPACK)
--no-host                               bypass host buffer allowing extra buffers to be used
                                        (env: LLAMA_ARG_NO_HOST)
--mlock                                 force system to keep model in RAM rather than swapping or compressing
                                        (env: LLAMA_ARG_MLOCK)
--mmap, --no-mmap                       whether to memory-map model. (if mmap disabled, slower load but may
                                        reduce pageouts if not using mlock) (default: enabled)
                                        (env: LLAMA_ARG_MMAP)
-dev,  --device <dev1,dev2,..>          comma-separated list of devices to use for offloading (none = don't
                                        offload)
                                        (env: LLAMA_ARG_DEVICE)
-ot,   --override-tensor <tensor name pattern>=<buffer type>,...
                                        override tensor buffer type
                                        (env: LLAMA_ARG_OVERRIDE_TENSOR)
-ngl,  --gpu-layers, --n-gpu-layers N   max. number of layers to store in VRAM, either an exact number,
                                        'auto', or 'all' (default: auto)
                                        (env: LLAMA_ARG_N_GPU_LAYERS)
--lora FNAME                            path to LoRA adapter (use comma-separated values to load multiple
                                        adapters)
--control-vector-layer-range START END
                                        layer range to apply the control vector(s) to, start and end inclusive
-m,    --model FNAME                    model path to load
                                        (env: LLAMA_ARG_MODEL)
-hf,   -hfr, --hf-repo <user>/<model>[:quant]
                                        Hugging Face model repository; quant is optional, case-insensitive,
                                        (env: LLAMA_ARG_HF_REPO)
-hft,  --hf-token TOKEN                 Hugging Face access token (default: value from HF_TOKEN environment
                                        variable)
                                        (env: HF_TOKEN)
-hff,  --hf-file FILE                   Hugging Face model file
                                        (env: LLAMA_ARG_HF_FILE)
--log-file FNAME                        Log to file
                                        (env: LLAMA_ARG_LOG_FILE)
--log-disable                           Log disable
--log-colors [on|off|auto]              Set colored logging ('on', 'off', or 'auto', default: 'auto')
                                        (env: LLAMA_ARG_LOG_COLORS)
-lv,   --verbosity, --log-verbosity N   Set the verbosity threshold. Messages with a higher verbosity will be
                                        ignored. Values:
                                         - 0: generic output
                                         - 1: error
                                        (env: LLAMA_ARG_LOG_VERBOSITY)


----- sampling params -----

--samplers SAMPLERS                     samplers that will be used for generation in the order, separated by
                                        ';'
--temp, --temperature N                 temperature (default: 0.80)
                                        (env: LLAMA_ARG_TEMP)


----- speculative params -----

--spec-type none,draft-simple,draft-mtp
                                        comma-separated list of types of speculative decoding to use
                                        (default: none)
                                        (env: LLAMA_ARG_SPEC_TYPE)
--spec-draft-model, -md, --model-draft FNAME
                                        draft model for speculative decoding (default: unused)
                                        (env: LLAMA_ARG_SPEC_DRAFT_MODEL)


----- example-specific params -----

-cram, --cache-ram N                    set the maximum cache size in MiB (default: 8192, -1 - no limit, 0 -
                                        disable)
                                        (env: LLAMA_ARG_CACHE_RAM)
--warmup, --no-warmup                   whether to perform warmup with an empty run (default: enabled)
-np,   --parallel N                     number of server slots (default: -1, -1 = auto)
                                        (env: LLAMA_ARG_N_PARALLEL)
-mm,   --mmproj FILE                    path to a multimodal projector file. see tools/mtmd/README.md
                                        (env: LLAMA_ARG_MMPROJ)
--mmproj-auto, --no-mmproj, --no-mmproj-auto
                                        whether to use multimodal projector file (if available)
                                        (env: LLAMA_ARG_MMPROJ_AUTO)
-a,    --alias STRING                   set model name aliases, comma-separated (to be used by API)
                                        (env: LLAMA_ARG_ALIAS)
--tags STRING                           set model tags, comma-separated (informational, not used for routing)
                                        (env: LLAMA_ARG_TAGS)
--host HOST                             ip address to listen, or bind to an UNIX socket if the address ends
                                        with .sock (default: 127.0.0.1)
                                        (env: LLAMA_ARG_HOST)
--port PORT                             port to listen (default: 8080)
                                        (env: LLAMA_ARG_PORT)
--cors-origins ORIGINS                  comma-separated list of allowed origins for CORS (default: *)
                                        (env: LLAMA_ARG_CORS_ORIGINS)
--api-prefix PREFIX                     prefix path the server serves from, without the trailing slash
                                        (env: LLAMA_ARG_API_PREFIX)
--tools TOOL1,TOOL2,...                 whether to enable built-in tools (default: no tools)
                                        (env: LLAMA_ARG_TOOLS)
--ui,  --webui, --no-ui, --no-webui     whether to enable the Web UI (default: enabled)
                                        (env: LLAMA_ARG_UI)
--api-key KEY                           API key to use for authentication, multiple keys can be provided as a
                                        comma-separated list (default: none)
                                        (env: LLAMA_API_KEY)
--ssl-key-file FNAME                    path to file a PEM-encoded SSL private key
                                        (env: LLAMA_ARG_SSL_KEY_FILE)
--ssl-cert-file FNAME                   path to file a PEM-encoded SSL certificate
                                        (env: LLAMA_ARG_SSL_CERT_FILE)
-to,   --timeout N                      server read/write timeout in seconds (default: 3600)
                                        (env: LLAMA_ARG_TIMEOUT)
--sse-ping-interval N                   server SSE ping interval in seconds (-1 = disabled, default: 30)
                                        (env: LLAMA_ARG_SSE_PING_INTERVAL)
--metrics                               enable prometheus compatible metrics endpoint (default: disabled)
                                        (env: LLAMA_ARG_ENDPOINT_METRICS)
--models-dir PATH                       directory containing models for the router server (default: disabled)
                                        (env: LLAMA_ARG_MODELS_DIR)
--models-preset PATH                    path to INI file containing model presets for the router server
                                        (env: LLAMA_ARG_MODELS_PRESET)
--models-max N                          for router server, maximum number of models to load simultaneously
                                        (default: 4, 0 = unlimited)
                                        (env: LLAMA_ARG_MODELS_MAX)
--models-autoload, --no-models-autoload
                                        for router server, whether to automatically load models (default:
                                        enabled)
                                        (env: LLAMA_ARG_MODELS_AUTOLOAD)
--jinja, --no-jinja                     whether to use jinja template engine for chat (default: enabled)
                                        (env: LLAMA_ARG_JINJA)
--chat-template JINJA_TEMPLATE          set custom jinja chat template (default: template taken from model's
                                        metadata)
                                        (env: LLAMA_ARG_CHAT_TEMPLATE)
--gpt-oss-20b-default                   use gpt-oss-20b (note: can download weights from the internet)
--sleep-idle-seconds SECONDS            number of seconds of idleness after which the server will sleep
                                        (default: -1; -1 = disabled)
                                        (env: LLAMA_ARG_SLEEP_IDLE_SECONDS)
"""

TABLE: OptionTable = parse_help(HELP)
