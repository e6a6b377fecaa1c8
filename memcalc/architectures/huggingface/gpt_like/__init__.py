"""Families before Llama, most of them derived from GPT-2: their layers share little but the base class."""
