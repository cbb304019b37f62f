-- Records of workers, and the weights that they need (pins). A record is deleted when its worker leaves or its
-- lease runs out; only the request to drain outlives the lease (lib/leases.lua).

local M = {}

-- The record of a worker; nil when it is not attached.
function M.read(run, worker)
  local record = redis.call("HGET", run.key.workers, worker)
  return record and text.object(record) or nil
end

-- As `read`, for a worker that has a lease.
function M.live(run, worker)
  return M.read(run, worker) or refuse.damaged("worker %s has a lease but no record", worker)
end

function M.write(run, record)
  changes.hset(run.key.workers, record.worker, text.json(record))
end

-- Pins are text: "3 5" while a worker that serves version 3 loads version 5.
function M.pin(run, worker, version)
  local pins = redis.call("HGET", run.key.pins, worker)
  local loaded = pins and string.match(pins, "^%d+")
  local wanted = text.int(version)
  if loaded and loaded ~= wanted then
    wanted = loaded .. " " .. wanted
  end
  changes.hset(run.key.pins, worker, wanted, pins)
end

-- A worker has loaded a version: pins of older ones end.
function M.pin_loaded(run, worker, version)
  local old = redis.call("HGET", run.key.pins, worker)
  local pins = text.int(version)
  local loading = string.match(old or "", "^%d+ (%d+)$")
  if loading and tonumber(loading) > version then
    pins = pins .. " " .. loading
  end
  changes.hset(run.key.pins, worker, pins, old)
end

-- Store a worker's last failure, for status.
function M.note_error(run, worker, message)
  local record = M.read(run, worker)
  if record then
    record.error, record.error_at = message, run.now
    M.write(run, record)
  end
end

return M
