"""Packaging of isp; the versions that a run is tested with are in constraints.txt."""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def read(file: str, name: str) -> str:
    """Return the string that a line of isp/`file` gives to `name`; the package is not imported."""
    for line in (ROOT / "isp" / file).read_text().splitlines():
        if line.startswith(f"{name} = "):
            return line.split('"')[1]
    raise RuntimeError(f"isp/{file} has no line that starts with {name}")


def transformers() -> str:
    """Return the requirement for the versions of transformers that isp was run with."""
    oldest = read("models/huggingface/versions.py", "OLDEST_TRANSFORMERS")
    major, minor = read("models/huggingface/versions.py", "NEWEST_TRANSFORMERS").split(".")
    return f"transformers>={oldest},<{major}.{int(minor) + 1}"


DOCS = ["mkdocs-material"]
DATA = ["pyarrow", "datasets", "fsspec"]
HF = ["tokenizers", transformers(), "jinja2"]
REPORT = ["matplotlib"]
TENSORBOARD = ["tensorboard"]
TRAINER = [*HF, "accelerate"]

setup(
    name="isp",
    version=read("__init__.py", "__version__"),
    description="A runtime and trainer for long-context language models on PyTorch",
    license="Apache-2.0",
    python_requires=">=3.11",
    classifiers=[f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)],
    packages=find_packages(include=["isp", "isp.*", "model", "model.*"]),
    package_data={
        "isp": ["py.typed"],
        "isp.models": ["known_code.txt"],
        "isp.planner": ["fabrics/*.yaml"],
        "model": ["py.typed"],
    },
    install_requires=[
        "torch>=2.11",
        "torch>=2.13; python_version >= '3.13'",  # older ones hang where a save fails
        "numpy",
        "einops",
        "pydantic>=2.10",
        "pyyaml",
        "safetensors",
        "tqdm",
    ],
    extras_require={
        "data": DATA,
        "docs": DOCS,
        "flash": ["flash-attn"],
        "hf": HF,
        "peft": ["peft"],
        "report": REPORT,
        "tensorboard": TENSORBOARD,
        "trainer": TRAINER,
        "dev": [
            *DATA,
            *DOCS,
            *REPORT,
            *TENSORBOARD,
            *TRAINER,
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "ruff",
            "mypy",
            "peft",
            "import-linter",
            "types-PyYAML",
        ],
    },
    entry_points={"console_scripts": ["isp = isp.__main__:run"]},
)
