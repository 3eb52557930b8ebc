"""Memory limits of the LM head product in `logit_chunks`. A separate module, because plans import no torch."""

CHUNK_BYTES = {"cpu": 256 * 2**20, "cuda": 512 * 2**20}
"""Head product size per chunk, in the operand dtype.

Each chunk adds a full weight gradient. With fewer than a few hundred rows, these additions cost more than the products.
"""
BLOCK_BYTES = {"cpu": 2**20, "cuda": 256 * 2**20}
"""Size of one block's float32 logits. On a CPU a block should fit a core's cache."""
