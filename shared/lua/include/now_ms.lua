-- The time of this change, by Redis's clock.
local now_ms
do
  local time = redis.call('TIME')
  now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
end
