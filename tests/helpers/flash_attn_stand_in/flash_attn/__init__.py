"""A stand-in on a CPU for the functions of flash-attn 2.8 that ring-flash-attn calls."""
