from stoker.base.private_api import check_private_api

check_private_api("stoker.kernels.triton")

from stoker.kernels.triton import cache_keys, launcher  # noqa: E402

cache_keys.install()
launcher.install()
