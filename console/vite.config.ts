import { defineConfig } from "vite";

// The names of the built files have no digest: the server sends an entity tag, and the files are committed.
export default defineConfig({
  base: "./",
  oxc: { jsx: { runtime: "automatic", importSource: "preact" } },
  build: {
    outDir: process.env.CONSOLE_OUT ?? "../src/stoker/server/protocols/console/static",
    emptyOutDir: true,
    assetsDir: "console",
    assetsInlineLimit: 0,
    modulePreload: false,
    target: "es2022",
    rolldownOptions: {
      output: {
        entryFileNames: "console/console.js",
        assetFileNames: "console/[name][extname]",
      },
    },
  },
});
