from stoker.base.private_api import check_private_api

check_private_api("stoker.kernels.triton.aot")
