"""Files that start a run on a cluster: one command with each scheduler's variables."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import yaml
from torch.distributed.run import parse_args

TOOLS = Path(__file__).parents[2] / "tools"
VARIABLES = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1800", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def _torchrun(script: str) -> dict[str, Any]:
    """Return the torchrun command of `script` without the scheduler's own values."""
    words = re.sub(r"\$\(.*?\)|\$\{.*?\}|\$\w+", "8", script.split("torchrun", 1)[1])
    args = parse_args(shlex.split(words.replace("\\\n", " ")))
    assert args.training_script == "isp"
    assert args.training_script_args[0] == "train"
    mine = "rdzv_id", "rdzv_endpoint", "training_script_args"
    return {name: value for name, value in vars(args).items() if name not in mine}


def test_every_scheduler_starts_the_same_command() -> None:
    """Catches a file that is not YAML, an unknown option, and a variable missing in one of them."""
    kubernetes = yaml.safe_load((TOOLS / "kubernetes.yaml").read_text())
    sky = yaml.safe_load((TOOLS / "skypilot.yaml").read_text())
    slurm = (TOOLS / "slurm.sbatch").read_text()
    assert (kubernetes["apiVersion"], kubernetes["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (job,) = kubernetes["spec"]["replicatedJobs"]
    pods = job["template"]["spec"]
    (container,) = pods["template"]["spec"]["containers"]
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    assert int(variables["NNODES"]) == pods["parallelism"] == pods["completions"]
    name = kubernetes["metadata"]["name"]
    assert variables["HEAD"] == f"{name}-{job['name']}-0-0.{name}"
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pods["template"]["spec"]["volumes"]}
    assert set(sky) == {
        *("name", "num_nodes", "resources", "workdir", "volumes", "setup", "envs", "run")
    }
    exported = dict(re.findall(r"^export (\w+)=(\d+)$", slurm, re.MULTILINE))
    for where in (variables, sky["envs"], exported):
        assert where.items() >= VARIABLES.items()
    (of_pod,) = container["args"]
    assert _torchrun(of_pod) == _torchrun(sky["run"]) == _torchrun(slurm.split("srun")[-1])
