"""Large results that are whole or not there, and models quantized into them."""
