"""Generation: what each GPU holds while prompts are read and tokens made, by formula."""
