"""What stores the teacher's signal: tokenisation, engines, shards, and the dataset builder that joins them."""
