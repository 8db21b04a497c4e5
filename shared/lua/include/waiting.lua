-- Requires: prefix. Returns a model's tickets, oldest first: {id, value = its JSON decoded}.
local function waiting(model)
  local flat = redis.call('HGETALL', prefix .. 'tickets:' .. model)
  local list = {}
  for i = 1, #flat, 2 do
    list[#list + 1] = { id = flat[i], value = cjson.decode(flat[i + 1]) }
  end
  table.sort(list, function(a, b)
    if a.value.enqueued_ms ~= b.value.enqueued_ms then
      return a.value.enqueued_ms < b.value.enqueued_ms
    end
    return a.id < b.id
  end)
  return list
end
