"""Model families of transformers: config.json to a `model:` block, and back."""
