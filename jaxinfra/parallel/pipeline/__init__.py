"""Pipeline parallelism: schedules as data, and one executor that runs any of them."""
