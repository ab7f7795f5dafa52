"""Plans carried out in fake memory and checked byte by byte, or proved from their tables."""
