# docker build -t jaxinfra .            with CUDA's libraries; --build-arg FLAVOUR=cpu without
# docker run --gpus all --shm-size 8g -v $PWD/runs:/runs jaxinfra train small --run /runs/small-1
FROM python:3.12-slim
ARG FLAVOUR=cuda
RUN apt-get update && apt-get install -y --no-install-recommends make && rm -rf /var/lib/apt/lists/*
WORKDIR /jaxinfra
COPY . .
# CUDA comes with the wheels of the lock file; the driver is the host's.
RUN make setup FLAVOUR=$FLAVOUR && .venv/bin/jaxinfra --version
ENV PATH=/jaxinfra/.venv/bin:$PATH
ENTRYPOINT ["jaxinfra"]
CMD ["--help"]
