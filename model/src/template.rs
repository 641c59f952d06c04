//! The model's own chat template, rendered by minijinja, and split into what stands before and after the chunks.

use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, Value, context};

use crate::Error;

/// One turn of a conversation.
#[derive(Clone, Debug)]
pub struct Message {
    /// `system`, `user` or `assistant`.
    pub role: &'static str,
    /// The text.
    pub content: String,
}

/// The text around the chunks of a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parts {
    /// Template head, system prompt and the line that announces the chunks.
    pub prefix: String,
    /// The question with the template's tail, up to where the answer begins.
    pub question: String,
}

/// A compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    bos: String,
    eos: String,
}

/// Stands for the chunks while a prompt is rendered. Letters only: no template trims or escapes it.
const CHUNKS: &str = "kvspliceChunksStandHere";

fn failed(error: minijinja::Error) -> Error {
    Error::Template(error.to_string())
}

impl ChatTemplate {
    /// Compiles `source` as Jinja with the extensions that model templates use.
    pub fn new(source: &str, bos: String, eos: String) -> Result<Self, Error> {
        let mut environment = Environment::new();
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().map_err(failed)?;
        environment.set_syntax(syntax);
        environment.add_function("raise_exception", |message: String| -> Result<String, minijinja::Error> {
            Err(minijinja::Error::new(minijinja::ErrorKind::InvalidOperation, message))
        });
        environment.add_template_owned("chat", source.to_owned()).map_err(failed)?;
        Ok(Self { environment, bos, eos })
    }

    /// Renders messages up to where the assistant's answer begins.
    pub fn render(&self, messages: &[Message]) -> Result<String, Error> {
        let template = self.environment.get_template("chat").map_err(failed)?;
        let messages: Vec<Value> = messages
            .iter()
            .map(|message| context! { role => message.role, content => message.content.as_str() })
            .collect();
        let values = context! { messages, add_generation_prompt => true, bos_token => self.bos.as_str(), eos_token => self.eos.as_str() };
        template.render(values).map_err(failed)
    }

    /// The prompt of a question over chunks, split where the chunks go. The user's turn is
    /// `Passages:\n` ++ chunks ++ `\nQuestion: ` ++ question, or, with an `intro`, intro ++ chunks ++ question.
    pub fn split(&self, system: &str, intro: Option<&str>, question: &str) -> Result<Parts, Error> {
        let user = match intro {
            None => format!("Passages:\n{CHUNKS}\nQuestion: {question}"),
            Some(intro) => format!("{intro}{CHUNKS}{question}"),
        };
        let messages =
            [Message { role: "system", content: system.to_owned() }, Message { role: "user", content: user }];
        let rendered = self.render(&messages)?;
        let mut pieces = rendered.split(CHUNKS);
        match (pieces.next(), pieces.next(), pieces.next()) {
            (Some(prefix), Some(question), None) => {
                Ok(Parts { prefix: prefix.to_owned(), question: question.to_owned() })
            }
            _ => Err(Error::Template("the template does not render the user's turn exactly once".to_owned())),
        }
    }
}
