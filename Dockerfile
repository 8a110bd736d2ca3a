# Headroom in an image.
#
#   docker build -t headroom .                              CPU
#   docker build -t headroom:cuda --build-arg TORCH=cuda .  CUDA (run it with --gpus all)
#   docker run --rm -p 8000:8000 -v headroom-cache:/cache headroom [MODEL] [--api-key KEY] ...
#
# The CPU kernels are compiled in. No model is baked in: it is fetched once, into the volume /cache.

FROM python:3.11-slim-bookworm AS build
ARG TORCH=cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
RUN command -v c++ || { apt-get update && apt-get install -y --no-install-recommends g++; }
RUN python -m venv /opt/headroom
COPY constraints.txt constraints-cpu.txt ./
RUN if [ "$TORCH" = cuda ]; then \
        /opt/headroom/bin/pip install -c constraints.txt torch; \
    else \
        /opt/headroom/bin/pip install --no-deps -c constraints-cpu.txt --extra-index-url "$TORCH_INDEX" torch; \
    fi
COPY pyproject.toml README.md LICENSE ./
COPY server server
COPY model model
COPY cache cache
RUN /opt/headroom/bin/pip install -c constraints.txt .
# For each kind of x86-64 CPU, as the image may run on another than built it, and without a compiler.
RUN if [ "$(uname -m)" = x86_64 ]; then /opt/headroom/bin/headroom kernels --portable; fi

FROM python:3.11-slim-bookworm
RUN useradd --uid 10001 --create-home headroom && install -d -o headroom -g headroom /cache
COPY --from=build /opt/headroom /opt/headroom
ENV PATH=/opt/headroom/bin:$PATH XDG_CACHE_HOME=/cache PYTHONUNBUFFERED=1
USER headroom
WORKDIR /home/headroom
VOLUME /cache
EXPOSE 8000
# The first start fetches the model, which may take minutes.
HEALTHCHECK --interval=10s --timeout=3s --start-period=300s \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health', timeout=2)"]
# Publish another port with -p, not with --port: the health check knows this one.
ENTRYPOINT ["headroom", "serve", "--host", "0.0.0.0", "--port", "8000"]
