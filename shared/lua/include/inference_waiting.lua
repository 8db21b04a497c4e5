-- Requires: prefix. Returns how many inference requests wait for a model; only they count against limits.
local function inference_waiting(model)
  local count = 0
  for _, ticket in ipairs(redis.call('HVALS', prefix .. 'tickets:' .. model)) do
    if cjson.decode(ticket).kind == 'inference' then
      count = count + 1
    end
  end
  return count
end
