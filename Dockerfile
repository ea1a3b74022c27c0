# ISP for CUDA. UNPROVEN: this file has not been built, and ISP has not run on a GPU yet.
#
#   docker build -t isp .
#   docker run --gpus all --ipc=host -v "$PWD/outputs:/isp/outputs" isp \
#       train configs/quickstart.yaml --nproc 4
#
# torch's wheel of Linux on x86 brings CUDA's libraries; the host has a driver that is new enough.
# The image has gcc, for torch.compile and Triton, but no nvcc: for flash-attn begin with an image of
# nvidia/cuda (devel), and add `pip install flash-attn --no-build-isolation`.
FROM python:3.12-bookworm

WORKDIR /isp
COPY constraints.txt ./
RUN pip install --no-cache-dir -c constraints.txt torch
COPY setup.py pyproject.toml LICENSE ./
COPY model model
COPY isp isp
RUN pip install --no-cache-dir -c constraints.txt ".[hf,report,tensorboard]"
COPY configs configs
COPY tools tools

# The exec form: a stop signal reaches `isp`, whose ranks finish their step and save. Give them time
# for it with `docker stop --time 1800`.
ENTRYPOINT ["isp"]
