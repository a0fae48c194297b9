"""The frozen base model: config, decoder, loading, quantisation."""
