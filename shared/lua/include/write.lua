-- Writes a table of fields into a hash.
local function write(key, fields)
  for field, value in pairs(fields) do
    redis.call('HSET', key, field, value)
  end
end
