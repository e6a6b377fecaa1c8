"""NeMo: the YAML of NeMo 1.x, and recipes of NeMo 2."""
