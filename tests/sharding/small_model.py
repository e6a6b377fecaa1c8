"""A small llama of which tests count the elements by hand."""

WIDTH, VOCAB, RANKS = 1024, 8192, 4


def sizes(layers: int) -> tuple[str, ...]:
    """Return its overrides, for one sequence of 64 tokens."""
    return (
        f"num_layers={layers}",
        f"hidden_size={WIDTH}",
        "num_attention_heads=16",
        "num_key_value_heads=16",
        "head_dim=64",
        f"intermediate_size={4 * WIDTH}",
        f"vocab_size={VOCAB}",
        "tie_word_embeddings=false",
        "b=1",
        "s=64",
        f"data_parallel={RANKS}",
    )
