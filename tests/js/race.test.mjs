// A race's lanes on one clock.
import assert from "node:assert/strict";
import { test } from "node:test";
import { at } from "../../assets/live/views/race.js";

test("a lane stands where its last step before the clock left it", () => {
  const points = [[0.5, 100, 1], [1, 201, 2], [2, 303, 3]];
  assert.deepEqual(at(points, 0), [0, 0, 0]);
  assert.deepEqual(at(points, 0.5), [0.5, 100, 1]);
  assert.deepEqual(at(points, 1.9), [1, 201, 2]);
  assert.deepEqual(at(points, 99), [2, 303, 3]);
  assert.deepEqual(at([], 1), [0, 0, 0]);
});
