// The AI SDK: its examples of tools and of structured output, by both of its clients for OpenAI's APIs.

import { createRequire } from 'node:module'
import { pathToFileURL } from 'node:url'

// The packages are those of the folder that the program is started in.
const require = createRequire(pathToFileURL(process.cwd() + '/'))
const load = (name) => import(pathToFileURL(require.resolve(name)))
const { generateText, streamText, stepCountIs, tool, Output } = await load('ai')
const { createOpenAI } = await load('@ai-sdk/openai')
const { createOpenAICompatible } = await load('@ai-sdk/openai-compatible')
const { z } = await load('zod')

const { OPENAI_BASE_URL: baseURL, OPENAI_API_KEY: apiKey, MODEL: name } = process.env
const openai = createOpenAI({ baseURL, apiKey })
const compatible = createOpenAICompatible({ name: 'llmcli', baseURL, apiKey, supportsStructuredOutputs: true })
const schema = z.object({ city: z.string(), temperature: z.number() })

let called
const asked = (model) => ({
  model,
  prompt: 'What is the weather in Rome?',
  stopWhen: stepCountIs(5),
  tools: {
    get_weather: tool({
      description: 'Get the weather of a city.',
      inputSchema: z.object({ city: z.string() }),
      execute: async ({ city }) => { called.push(city); return '22 degrees' },
    }),
  },
})
function assertAnswered(text) {
  if (called.length !== 1 || typeof called[0] !== 'string') throw new Error(`called: ${JSON.stringify(called)}`)
  if (!text.includes('22 degrees')) throw new Error(`said: ${text}`)
}

const checks = {}
for (const [api, model] of [['compatible', compatible(name)], ['chat', openai.chat(name)], ['responses', openai(name)]]) {
  checks[`${api}_tools`] = async () => assertAnswered((await generateText(asked(model))).text)
  checks[`${api}_tools_streamed`] = async () => {
    const result = streamText({ ...asked(model), onError: () => {} })
    for await (const part of result.fullStream) if (part.type === 'error') throw part.error
    assertAnswered(await result.text)
  }
  checks[`${api}_structured`] = async () => {
    const { output } = await generateText({ model, output: Output.object({ schema }), prompt: 'Weather of Rome' })
    schema.parse(output)
  }
  checks[`${api}_tools_structured`] = async () => {
    const { output } = await generateText({ ...asked(model), output: Output.object({ schema }) })
    schema.parse(output)
    assertAnswered('22 degrees')
  }
}

const results = {}
for (const [check, run] of Object.entries(checks)) {
  called = []
  try { await run(); results[check] = 'passed' } catch (error) { results[check] = `failed: ${error}`; console.error(error) }
}
console.log(JSON.stringify({ package: 'ai', version: require('ai/package.json').version, results }))
