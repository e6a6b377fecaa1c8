"""Packages that each extra installs, for messages that suggest a `pip install`.

The packages are named rather than the extra. memcalc may be installed from a clone, a wheel or an index, and a
message that names one of these would be wrong for the others.
"""

from __future__ import annotations

# The same requirements as the extras in pyproject.toml; a test compares both.
REQUIREMENTS: dict[str, tuple[str, ...]] = {
    "torch": ("torch>=2.6", "nvidia-ml-py>=12.535"),
    "hub": ("huggingface-hub>=0.30",),
    "hf": ("torch>=2.6", "nvidia-ml-py>=12.535", "transformers>=4.51"),
    "diffusers": ("torch>=2.6", "nvidia-ml-py>=12.535", "transformers>=4.51", "diffusers>=0.35"),
    "peft": ("torch>=2.6", "nvidia-ml-py>=12.535", "transformers>=4.51", "peft>=0.18", "bitsandbytes>=0.46"),
    "torchao": ("torch>=2.6", "nvidia-ml-py>=12.535", "torchao>=0.18"),
    "null": ("torch>=2.6", "nvidia-ml-py>=12.535", "pyelftools>=0.30"),
    "plan": ("scipy>=1.11",),
    "plot": ("matplotlib>=3.8",),
    "browser": ("playwright>=1.45",),
    "cluster": ("dask>=2025.1", "distributed>=2025.1"),
    "parquet": ("pyarrow>=15",),
}


def installation(extra: str) -> str:
    """Return the command that installs what an extra of memcalc needs: "pip install 'scipy>=1.11'"."""
    packages = " ".join(f"'{each}'" for each in REQUIREMENTS[extra])
    return f"pip install {packages}"
