# Serves the retriever that is mounted at /retriever, as a user without rights; with --target train,
# it is a node of a Ray cluster that trains, see examples/kuberay.yaml.
ARG PYTHON=3.11
FROM python:${PYTHON}-slim AS build
ARG DEVICE=cpu
WORKDIR /build
RUN python -m venv /opt/rcir && /opt/rcir/bin/pip install --no-cache-dir uv
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY rcir rcir
COPY training training
COPY calibration calibration
COPY tuning tuning
# A CPU build of PyTorch is a tenth of one with CUDA's libraries. The version of CUDA is that of
# faiss-gpu-cuvs; "auto" would look for a driver on the machine that builds the image.
RUN case "$DEVICE" in \
        cpu) backend=cpu;; \
        gpu) backend=cu132;; \
        *) echo "error: DEVICE is $DEVICE; give cpu or gpu" >&2; exit 1;; \
    esac && \
    /opt/rcir/bin/uv pip install --no-cache --python /opt/rcir/bin/python \
        --constraint constraints.txt --torch-backend "$backend" ".[$DEVICE,all]"

FROM python:${PYTHON}-slim AS train
# KubeRay's probes call wget. Ray sets the threads of each worker by its share of CPUs.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends wget && \
    rm -rf /var/lib/apt/lists/* && useradd --create-home --uid 10001 rcir
COPY --from=build /opt/rcir /opt/rcir
COPY --chown=rcir configs /home/rcir/configs
USER 10001
WORKDIR /home/rcir
ENV PATH=/opt/rcir/bin:$PATH PYTHONUNBUFFERED=1
CMD ["rcir", "--help"]

FROM python:${PYTHON}-slim
RUN useradd --create-home --uid 10001 rcir && install -d -o rcir /feedback
COPY --from=build /opt/rcir /opt/rcir
USER 10001
WORKDIR /home/rcir
ENV PATH=/opt/rcir/bin:$PATH PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
VOLUME /feedback
EXPOSE 8000
HEALTHCHECK --interval=30s --start-period=120s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/ready')"]
# It listens beyond loopback, so that RCIR_TOKEN must be set.
ENTRYPOINT ["rcir", "serve"]
CMD ["/retriever", "--host", "0.0.0.0", "--feedback", "/feedback/feedback.db"]
