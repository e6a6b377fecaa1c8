"""The optimizer step: optimizer states, and tensors allocated and freed within the step."""
