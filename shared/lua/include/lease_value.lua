-- A lease is kept as "<lease id>:<beat of its gateway when it was booked>".
local function lease_id(value)
  return value and string.match(value, '^(.*):%d+$')
end

local function lease_beat(value)
  return tonumber(string.match(value, ':(%d+)$'))
end
