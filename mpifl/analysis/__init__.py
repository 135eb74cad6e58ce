"""Analysis: runs compared, summed up, drawn and reported."""
