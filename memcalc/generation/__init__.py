"""Generation: memory per GPU while prompts are processed and tokens are generated, from formulas."""
