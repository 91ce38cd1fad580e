from stoker.kernels.triton import cache_keys

cache_keys.install()
