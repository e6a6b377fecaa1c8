"""Lightning's demonstration model by its own command line."""

from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.transformer import LightningTransformer

if __name__ == "__main__":
    LightningCLI(LightningTransformer)
