"""How large a batch may be, before anything runs: a search on the device, and a forecast without one."""
