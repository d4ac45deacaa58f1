"""Tables of rows (embeddings) in parts on the ranks that share the batch, and over memory tiers."""
