// @ts-check
// What figures import: all that the shared scripts have.
export * from "./common.js";
export * from "./algebra.js";
export * from "./model.js";
