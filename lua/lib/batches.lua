-- Batches that were taken and are not freed yet: by the version that they were taken for, their groups in slot order.

local M = {}

-- Numbers of the groups of a batch, as text; nil when none was taken.
function M.read(run, version)
  local ids = redis.call("HGET", run.key.batches, text.int(version))
  if not ids then
    return nil
  end
  local list = {}
  for id in string.gmatch(ids, "%d+") do
    list[#list + 1] = id
    if #list > run.config.batch_size then
      refuse.damaged("batch %s has more groups than a batch", text.int(version))
    end
  end
  return list
end

function M.write(run, version, ids)
  if #ids > 0 then
    changes.hset(run.key.batches, text.int(version), table.concat(ids, " "))
  else
    changes.hdel(run.key.batches, text.int(version))
  end
end

return M
