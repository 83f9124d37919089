"""What a train step takes of a described TPU slice: bytes, operations, traffic; counted, searched and compiled without a chip."""
