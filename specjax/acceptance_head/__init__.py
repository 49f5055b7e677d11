"""The acceptance head: how likely the verifier accepts a drafted token (SpecDec++)."""
