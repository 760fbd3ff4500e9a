# docker build -t expert-threshold . && docker run --rm -it -v "$PWD/runs:/work/runs" expert-threshold train --minutes 4
FROM python:3.12-slim
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu -c constraints.txt '.[viz,serve]'
WORKDIR /work
ENTRYPOINT ["et"]
CMD ["--help"]
